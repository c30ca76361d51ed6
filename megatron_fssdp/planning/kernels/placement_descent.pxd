import cython
from megatron_fssdp.planning.kernels.constants cimport WIDTH, ROUNDING
from megatron_fssdp.planning.kernels.priced_layer cimport PricedLayer

cdef class PlacementDescent(PricedLayer):
    cdef double best, trial_s, kept_s
    cdef unsigned char[:, ::1] kept_ED, tried_D
    cdef double[:, ::1] plain
    cdef Py_ssize_t most_replicated, most_prices
    @cython.final
    cdef void keep_this(self) noexcept nogil
    @cython.locals(seconds=double)
    @cython.final
    cdef double keep(self) noexcept nogil
    @cython.final
    cdef void hold(self, Py_ssize_t expert, unsigned char[:, ::1] table, Py_ssize_t row) noexcept nogil
    @cython.final
    cdef void spread(self, Py_ssize_t expert, Py_ssize_t kind) noexcept nogil
    @cython.final
    cdef void go_back(self) noexcept nogil
    @cython.final
    cdef void drop_all(self) noexcept nogil
    @cython.locals(num=Py_ssize_t)
    @cython.final
    cdef bint may_grow(self, Py_ssize_t expert) noexcept nogil
    @cython.final
    cdef Py_ssize_t least_loaded(self, Py_ssize_t expert, Py_ssize_t node, bint is_full) noexcept nogil
    @cython.final
    cdef void note(self, Py_ssize_t expert) noexcept nogil
    @cython.final
    cdef void try_put(self, Py_ssize_t expert, Py_ssize_t device, Py_ssize_t sign) noexcept nogil
    @cython.locals(may_grow=bint, is_alone=bint, gained=bint)
    @cython.final
    cdef bint improve(self, Py_ssize_t expert) noexcept nogil
    @cython.final
    cdef bint swap(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(least=double, seconds=double)
    @cython.final
    cdef double price_exchange(self, Py_ssize_t comes, Py_ssize_t goes, Py_ssize_t device, Py_ssize_t back) noexcept nogil
    @cython.final
    cdef void exchange(self, Py_ssize_t comes, Py_ssize_t goes, Py_ssize_t device, Py_ssize_t back) noexcept nogil
    @cython.final
    cdef Py_ssize_t least_useful(self, Py_ssize_t device) noexcept nogil
    @cython.final
    cdef void descend(self, bint is_smooth, Py_ssize_t num_free) noexcept nogil
    @cython.final
    cdef bint step(self) noexcept nogil
