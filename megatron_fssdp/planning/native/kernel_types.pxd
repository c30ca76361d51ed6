# C types of the names in kernel_types.py.

ctypedef long long Int
ctypedef Py_ssize_t Index
ctypedef double Real
ctypedef bint Flag
ctypedef long long[::1] Ints
ctypedef long long[:, ::1] Ints2
ctypedef const long long[::1] ReadInts
ctypedef const long long[:, ::1] ReadInts2
ctypedef const unsigned char[:, ::1] ReadBytes2
ctypedef double[::1] Reals
ctypedef double[:, ::1] Reals2
ctypedef const double[::1] ReadReals
ctypedef const double[:, ::1] ReadReals2
