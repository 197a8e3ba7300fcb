"""A linear layer whose weight stays in 4 or 8 bits, and the rows of such a weight as embeddings."""

from kernels.quantized_linear.cpu import QuantizedLinear
from kernels.quantized_linear.matrix import QuantizedMatrix, joined
from kernels.quantized_linear.reference import quantized_linear_reference

__all__ = ["QuantizedLinear", "QuantizedMatrix", "joined", "quantized_linear_reference"]
