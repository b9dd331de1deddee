"""Context parallelism: attention over a sequence whose rows lie on the ranks of a process group."""

from .attention import attention, attention_varlen, explain
from .layout import Layout
from .sharding import positions, shard, unshard
from .work import work_of_rows

__all__ = ["Layout", "attention", "attention_varlen", "explain", "positions", "shard", "unshard", "work_of_rows"]
