import cython
from megatron_fssdp.planning.kernels.constants cimport HIGHEST_LEVEL, LEVEL_STEP, NUM_LEVELS, KICK_PRICES, MOST_FREE
from megatron_fssdp.planning.kernels.placement_descent cimport PlacementDescent

cdef class PlacementSearch(PlacementDescent):
    cdef bint is_quick
    cdef double[::1] plan_D
    cdef Py_ssize_t[::1] want_E, by_owner_E, first_D, hottest_E, order_D, taken_D
    cdef const double[:, ::1] load_DE
    cdef double[:, ::1] load_NE
    @cython.locals(gained=bint)
    cdef void climb(self) noexcept nogil
    @cython.locals(room=Py_ssize_t, gain=double, most=double, wanted=Py_ssize_t, picked=Py_ssize_t, more=Py_ssize_t)
    cdef Py_ssize_t give_away(self, bint in_all_nodes, double level, Py_ssize_t room) noexcept nogil
    cdef void place_wanted(self) noexcept nogil
    @cython.locals(num_taken=Py_ssize_t, taken=Py_ssize_t, next_at=Py_ssize_t, at=Py_ssize_t, is_free=bint)
    cdef void place(self, Py_ssize_t expert, double part, Py_ssize_t most) noexcept nogil
    @cython.locals(at=Py_ssize_t, previous=Py_ssize_t, plan=double)
    cdef void sort(self) noexcept nogil
    cdef void seed_by_levels(self) noexcept nogil
    @cython.locals(turn=Py_ssize_t, missed=Py_ssize_t, expert=Py_ssize_t)
    cdef void kick(self) noexcept nogil
    @cython.locals(num_replicated=Py_ssize_t)
    cdef void seed_by_sources(self) noexcept nogil
    @cython.locals(most=double, load=double, has=bint, is_first=bint)
    cdef Py_ssize_t fetch(self, Py_ssize_t device, bint for_node, Py_ssize_t num) noexcept nogil
    cdef void seed_by_shadows(self) noexcept nogil
    cdef void prune(self) noexcept nogil
    cdef void run(self) noexcept nogil
