import cython
from megatron_fssdp.planning.kernels.priced_layer cimport PricedLayer

cdef class ExpertParts(PricedLayer):
    cdef double[::1] part_E
    cdef Py_ssize_t[::1] is_tired_E
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
