"""Everything a client or an operator touches."""

__version__ = "0.1.0"
