"""What the command line says where it cannot do what it is asked."""


class Refusal(ValueError):
    """Of a command, before it measures or writes anything: one line for people, who need no traceback."""
