"""How a kernel runs: on an NPU, on CUDA, compiled on a CPU, or interpreted."""
