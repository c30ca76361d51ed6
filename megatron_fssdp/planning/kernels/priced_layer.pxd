import cython
from megatron_fssdp.planning.kernels.constants cimport LEAST_LEFT, NO_PAIRS, NO_PRICE, ROUNDING
from megatron_fssdp.planning.kernels.layer_traffic cimport LayerTraffic

cdef class PricedLayer(LayerTraffic):
    cdef double[:, ::1] most
    cdef double[::1] all_nodes
    cdef Py_ssize_t hops, fill, num_prices, known
    cdef bint is_smooth, most_is_smooth
    cdef double rest_s, most_work
    cdef readonly double start_s
    @cython.locals(seconds=double)
    @cython.final
    cdef double price(self) noexcept nogil
    @cython.locals(work=double)
    @cython.final
    cdef void aim_below(self, double seconds) noexcept nogil
    @cython.locals(tokens=double, pairs=double, moved=double, moved_far=double, most=double, is_smooth=bint)
    @cython.final
    cdef void look_at(self, Py_ssize_t node, Py_ssize_t row) noexcept nogil
    @cython.locals(pairs=double, sent=double, is_smooth=bint)
    @cython.final
    cdef void look_between(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert) noexcept nogil
    @cython.locals(tokens=double, pairs=double, moved=double, moved_far=double, far_device=double, share=double, got=double, sent=double, least=double, more=double, is_smooth=bint, limits=bint, num=Py_ssize_t, at=Py_ssize_t, rank=Py_ssize_t)
    @cython.final
    cdef void add_holders(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert, Py_ssize_t without) noexcept nogil
    @cython.final
    cdef void join(self, Py_ssize_t row, Py_ssize_t first, Py_ssize_t last) noexcept nogil
    @cython.locals(row=Py_ssize_t, without=Py_ssize_t, lacking=Py_ssize_t, is_smooth=bint, is_lost=bint)
    @cython.final
    cdef bint join_holders(self, Py_ssize_t expert) noexcept nogil
    @cython.final
    cdef void join_all(self, Py_ssize_t first) noexcept nogil
    @cython.locals(row=Py_ssize_t, is_held=bint)
    @cython.final
    cdef void join_beside(self, Py_ssize_t expert, Py_ssize_t beside) noexcept nogil
    @cython.locals(hops=Py_ssize_t, fill=Py_ssize_t)
    @cython.final
    cdef double price_with(self, Py_ssize_t expert, Py_ssize_t beside) noexcept nogil
    @cython.locals(tokens=double, near=double, far=double, far_device=double, moved_near=double, moved_far=double, moved_device=double)
    @cython.final
    cdef double joined_seconds(self, Py_ssize_t hops, Py_ssize_t fill) noexcept nogil

cdef double _raised(bint is_smooth, double value) noexcept nogil
cdef double _join(bint is_smooth, double most, double value) noexcept nogil
cdef double _grow(bint is_smooth, double most, double before, double after) noexcept nogil
cdef double _eighth_root(double number) noexcept nogil
