import cython
from megatron_fssdp.planning.kernels.constants cimport WIDTH, ROUNDING, WORK, IN, OUT
from megatron_fssdp.planning.kernels.priced_layer cimport PricedLayer

cdef class PlacementDescent(PricedLayer):
    cdef double best, trial_s, kept_s
    cdef unsigned char[:, ::1] kept_ED, tried_D
    cdef Py_ssize_t most_replicated, most_prices
    cdef double[::1] part_E
    cdef Py_ssize_t[::1] is_tired_E
    @cython.final
    cdef void keep_this(self) noexcept nogil
    @cython.locals(seconds=double)
    cdef double keep(self) noexcept nogil
    cdef void hold(self, Py_ssize_t expert, unsigned char[:, ::1] table, Py_ssize_t row) noexcept nogil
    cdef void spread(self, Py_ssize_t expert, Py_ssize_t kind) noexcept nogil
    cdef void become(self, unsigned char[:, ::1] to_ED) noexcept nogil
    @cython.locals(num=Py_ssize_t)
    cdef bint may_grow(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(at=Py_ssize_t, column=Py_ssize_t, first=Py_ssize_t, last=Py_ssize_t, kind=Py_ssize_t, most=double, seconds=double)
    cdef void rank(self, bint of_links) noexcept nogil
    cdef Py_ssize_t least_loaded(self, Py_ssize_t expert, Py_ssize_t node, bint is_full) noexcept nogil
    cdef void note(self, Py_ssize_t expert) noexcept nogil
    cdef void try_put(self, Py_ssize_t expert, Py_ssize_t device, Py_ssize_t sign) noexcept nogil
    @cython.locals(may_grow=bint, gained=bint)
    cdef bint improve(self, Py_ssize_t expert) noexcept nogil
    cdef bint swap(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(least=double, seconds=double)
    cdef double price_exchange(self, Py_ssize_t expert, Py_ssize_t other, Py_ssize_t device, Py_ssize_t back) noexcept nogil
    cdef void exchange(self, Py_ssize_t comes, Py_ssize_t goes, Py_ssize_t device, Py_ssize_t back) noexcept nogil
    cdef Py_ssize_t least_useful(self, Py_ssize_t device) noexcept nogil
    cdef void descend(self, bint is_smooth, Py_ssize_t num_free) noexcept nogil
    cdef bint step(self) noexcept nogil
    @cython.locals(is_device=bint, is_sent=bint, node=Py_ssize_t, near=double, each_far=double)
    cdef double part_of(self, Py_ssize_t expert, Py_ssize_t place, Py_ssize_t column) noexcept nogil
    cdef Py_ssize_t largest_part(self) noexcept nogil
