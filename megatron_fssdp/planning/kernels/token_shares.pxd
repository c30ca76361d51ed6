import cython

@cython.locals(begin=Py_ssize_t, end=Py_ssize_t, far=double)
cpdef void share_evenly(const double[:, ::1] counts_DE, const Py_ssize_t[::1] node_D, const Py_ssize_t[::1] first_E, const Py_ssize_t[::1] holder_P, double[:, ::1] of_node, double[:, ::1] tokens_ED) noexcept nogil

@cython.locals(total=double, prior=double, scale=double, weighted=double, per_weight=double, load=double)
cpdef void share_exactly(const Py_ssize_t[::1] first_E, const Py_ssize_t[::1] holder_P, const double[::1] total_E, const Py_ssize_t[::1] exponents, double[:, ::1] of_device, double[::1] part_P, double[:, ::1] tokens_ED, double any_holder, double least_load) noexcept nogil

@cython.locals(tokens=double, count=double, near=double, far=double, moved=double, side=Py_ssize_t)
cpdef void count_moves(const double[:, ::1] counts_DE, const double[:, ::1] tokens_ED, const Py_ssize_t[::1] node_D, double[:, ::1] of_node, double[:, ::1] of_device, double[::1] busiest) noexcept nogil
