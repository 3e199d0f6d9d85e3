"""Native CPU kernels: C++ in `src/`, built on first use, each with a slow twin in plain torch."""
