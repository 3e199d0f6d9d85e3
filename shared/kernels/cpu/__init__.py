"""Native CPU kernels in C++ (`src/`). They are built at their first use. Each has a slow twin in plain torch."""
