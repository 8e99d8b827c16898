"""Kernels in C++ for CPUs: built with the machine's compiler on first use, called through ctypes."""
