"""The operations of a packed decoder over paged KV: a torch reference for each, and a C++ version for CPU."""
