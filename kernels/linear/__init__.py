"""A linear layer with packed weights whose rows do not depend on the batch they are in."""

from kernels.linear.packed import PackedLinear
from kernels.linear.reference import linear_reference

__all__ = ["PackedLinear", "linear_reference"]
