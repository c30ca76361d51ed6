import cython
from megatron_fssdp.planning.kernels.constants cimport HOP_BITS

cdef class PriceFormula:
    cdef double[:, ::1] dispatch, combine, moves, of_hops
    cdef double per_token, times, counts, hidden, hidden_back, early, first, added
    cdef double all_to_all, experts, waits, waits_back
    cdef bint is_resident, is_pass, is_micro_batch, in_turn, is_far, limits_devices
    cdef double gather_of(self, tuple traffic)
    cdef double exchange(self, double[:, ::1] lines, double near, double far, double device) noexcept nogil
    @cython.locals(first=Py_ssize_t)
    cdef double transfer(self, Py_ssize_t column, double near, double far, double device, Py_ssize_t hops, Py_ssize_t fill) noexcept nogil
    @cython.locals(again_is_far=bint, combine_is_far=bint)
    cdef double seconds(self, double tokens, double near, double far, double device, double moved_near, double moved_far, double moved_device, Py_ssize_t hops, Py_ssize_t fill) noexcept nogil
