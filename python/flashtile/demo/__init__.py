"""`flashtile demo`: is it exact, is it fast, does a model train the same with it?"""

from flashtile.demo.stages import run

__all__ = ["run"]
