import cython
from megatron_fssdp.planning.kernels.constants cimport NO_PAIRS, HOP_BITS
from megatron_fssdp.planning.kernels.price_formula cimport PriceFormula
from megatron_fssdp.planning.kernels.transfer_trees cimport TransferTrees

cdef class LayerTraffic(TransferTrees):
    cdef PriceFormula costs
    cdef double[:, ::1] load_ED, load_EN, rest_EN
    cdef double[::1] total_E, unserved_E, work, pairs_in, pairs_out, moves_in, moves_out, own_in, own_out, part_E
    cdef double all_pairs, each_far
    cdef Py_ssize_t slots, own_hops, own_fill, far_at, version, num_held
    cdef Py_ssize_t[::1] used_D, holders_E, hops_E, fill_E, is_stale_N, is_changed_E, is_tired_E, held_N
    cdef Py_ssize_t[:, ::1] holders_EN
    @cython.locals(num=Py_ssize_t, left=Py_ssize_t)
    @cython.final
    cdef void walk(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(num=Py_ssize_t)
    @cython.final
    cdef Py_ssize_t rank_of_first(self, Py_ssize_t expert, Py_ssize_t node, Py_ssize_t at) noexcept nogil
    @cython.final
    cdef void count(self, Py_ssize_t expert, Py_ssize_t sign) noexcept nogil
    @cython.locals(num=Py_ssize_t)
    @cython.final
    cdef void count_held(self, Py_ssize_t expert, Py_ssize_t sign) noexcept nogil
    @cython.locals(share=double, num=Py_ssize_t, rank=Py_ssize_t, limits=bint)
    @cython.final
    cdef void count_in(self, Py_ssize_t expert, Py_ssize_t node, double sign) noexcept nogil
    @cython.locals(pairs=double)
    @cython.final
    cdef void put(self, Py_ssize_t expert, Py_ssize_t device, Py_ssize_t sign) noexcept nogil
    @cython.locals(at=Py_ssize_t, is_out=bint, kind=Py_ssize_t, most=double, seconds=double)
    @cython.final
    cdef void rank(self, bint of_links) noexcept nogil
    @cython.locals(near=double)
    @cython.final
    cdef double part_of(self, Py_ssize_t expert, Py_ssize_t device) noexcept nogil
    @cython.locals(node=Py_ssize_t, each_far=double, load=double)
    @cython.final
    cdef double part_of_link(self, Py_ssize_t expert, Py_ssize_t place, bint is_out) noexcept nogil
    @cython.final
    cdef Py_ssize_t largest_part(self) noexcept nogil
