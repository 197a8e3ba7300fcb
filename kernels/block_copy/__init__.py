"""Copies whole blocks of a paged cache: the tail of a fork before it is written."""

from kernels.block_copy.reference import copy_blocks

__all__ = ["copy_blocks"]
