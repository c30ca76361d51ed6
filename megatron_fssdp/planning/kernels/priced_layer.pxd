import cython
from megatron_fssdp.planning.kernels.constants cimport FAR_PAIRS, NO_PAIRS, HOP_BITS, WORK, IN, OUT, GETS, SENDS
from megatron_fssdp.planning.kernels.price_formula cimport PriceFormula
from megatron_fssdp.planning.kernels.transfer_trees cimport TransferTrees

cdef class PricedLayer(TransferTrees):
    cdef PriceFormula costs
    cdef double[:, ::1] load_ED, load_EN, rest_EN, busy, own, most
    cdef double[::1] all_nodes
    cdef double[::1] total_E, unserved_E
    cdef double all_pairs
    cdef Py_ssize_t slots, own_hops, own_fill, hops, fill, num_prices, far_at, version, known
    cdef Py_ssize_t[::1] used_D, holders_E, hops_E, fill_E, is_stale_N
    cdef double each_far
    cdef Py_ssize_t[:, ::1] holders_EN
    cdef bint is_smooth, most_is_smooth
    cdef readonly double start_s
    @cython.locals(num=Py_ssize_t, left=Py_ssize_t)
    @cython.final
    cdef void walk(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(num=Py_ssize_t)
    @cython.final
    cdef Py_ssize_t rank_of_first(self, Py_ssize_t expert, Py_ssize_t node, Py_ssize_t at) noexcept nogil
    cdef void count(self, Py_ssize_t expert, Py_ssize_t sign) noexcept nogil
    @cython.locals(share=double, num=Py_ssize_t, rank=Py_ssize_t, limits=bint)
    @cython.final
    cdef void count_in(self, Py_ssize_t expert, Py_ssize_t node, double sign) noexcept nogil
    @cython.locals(pairs=double)
    @cython.final
    cdef void put(self, Py_ssize_t expert, Py_ssize_t device, Py_ssize_t sign) noexcept nogil
    cdef double price(self) noexcept nogil
    @cython.locals(tokens=double, pairs=double, moved=double, moved_far=double, share=double, computed=double, got=double, sent=double, is_smooth=bint, limits=bint, has=bint, num=Py_ssize_t, at=Py_ssize_t, rank=Py_ssize_t)
    @cython.final
    cdef void look_at(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert) noexcept nogil
    @cython.locals(pairs=double, got=double, sent=double, gets=double, sends=double, is_smooth=bint, is_sent=bint)
    @cython.final
    cdef void look_between(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert, bint is_held) noexcept nogil
    @cython.final
    cdef void look_without(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert) noexcept nogil
    @cython.final
    cdef void join_none(self) noexcept nogil
    @cython.final
    cdef void join(self, Py_ssize_t row, Py_ssize_t first) noexcept nogil
    @cython.locals(after=Py_ssize_t, joined=Py_ssize_t)
    @cython.final
    cdef void join_holders(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(hops=Py_ssize_t, fill=Py_ssize_t, row=Py_ssize_t)
    cdef double price_with(self, Py_ssize_t expert, Py_ssize_t beside) noexcept nogil
    @cython.locals(tokens=double, near=double, far=double, far_device=double, moved_near=double, moved_far=double, moved_device=double)
    @cython.final
    cdef double joined_seconds(self, Py_ssize_t hops, Py_ssize_t fill) noexcept nogil

cdef double _raised(bint is_smooth, double value) noexcept nogil
cdef double _join(bint is_smooth, double most, double value) noexcept nogil
cdef double _eighth_root(double number) noexcept nogil
