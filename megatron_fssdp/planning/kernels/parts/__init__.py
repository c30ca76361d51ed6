"""Parts of kernels: classes that a kernel's source takes in as text when it is compiled."""
