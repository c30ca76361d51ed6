import cython

cdef class TransferTrees:
    cdef Py_ssize_t num_experts, num_devices, num_nodes
    cdef const Py_ssize_t[::1] owner_E, node_D, first_N, member_D
    cdef Py_ssize_t[::1] place_D, start_E, line_D
    cdef unsigned char[:, ::1] has_ED
    @cython.final
    cdef Py_ssize_t leader_at(self, Py_ssize_t expert, Py_ssize_t node) noexcept nogil
    cdef Py_ssize_t line_up(self, Py_ssize_t expert, Py_ssize_t node) noexcept nogil
    @cython.locals(leader=Py_ssize_t, depth=Py_ssize_t)
    cpdef void write_edges(self, Py_ssize_t[:, ::1] edges) noexcept

@cython.locals(expert=Py_ssize_t, source=Py_ssize_t, device=Py_ssize_t, hops=Py_ssize_t, far_hops=Py_ssize_t, is_far=Py_ssize_t)
cpdef void count_edges(const Py_ssize_t[:, ::1] table, const Py_ssize_t[::1] node_D, Py_ssize_t[:, ::1] hops_ED, Py_ssize_t[:, ::1] of_device, Py_ssize_t[:, ::1] of_node, Py_ssize_t[::1] results) noexcept nogil
