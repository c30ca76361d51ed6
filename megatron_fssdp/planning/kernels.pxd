# C types of what kernels.py declares; local variables get theirs from these.

import cython

cdef double _HIGHEST_LEVEL, _LEVEL_STEP, _ROUNDING, _NO_PAIRS
cdef Py_ssize_t _NUM_LEVELS, _WIDTH, _KICK_PRICES, _MOST_FREE, _HOP_BITS
cdef Py_ssize_t _WORK, _IN, _OUT, _GETS, _SENDS

cdef class Trees:
    cdef Py_ssize_t num_experts, num_devices, num_nodes
    cdef const Py_ssize_t[::1] owner_E, node_D, first_N, member_D
    cdef Py_ssize_t[::1] place_D, start_E, line_D
    cdef unsigned char[:, ::1] has_ED
    @cython.final
    cdef Py_ssize_t leader_at(self, Py_ssize_t expert, Py_ssize_t node) noexcept nogil
    cdef Py_ssize_t line_up(self, Py_ssize_t expert, Py_ssize_t node) noexcept nogil
    @cython.locals(leader=Py_ssize_t, depth=Py_ssize_t)
    cpdef void write_edges(self, Py_ssize_t[:, ::1] edges) noexcept

cdef class Price:
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

cdef class Layer(Trees):
    cdef Price costs
    cdef double[:, ::1] load_ED, load_EN, rest_EN, busy, own, most
    cdef double[::1] total_E
    cdef double all_pairs
    cdef Py_ssize_t slots, own_hops, own_fill, hops, fill, num_prices, far_at, version
    cdef Py_ssize_t[::1] used_D, holders_E, hops_E, fill_E, is_stale_N, known_N
    cdef double each_far
    cdef Py_ssize_t[:, ::1] holders_EN
    cdef bint is_smooth, most_is_smooth
    cdef readonly double start_s
    @cython.locals(pairs=double)
    @cython.final
    cdef double unserved(self, Py_ssize_t expert) noexcept nogil
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
    @cython.final
    cdef void put(self, Py_ssize_t expert, Py_ssize_t device, Py_ssize_t sign) noexcept nogil
    cdef double price(self) noexcept nogil
    @cython.locals(tokens=double, pairs=double, moved=double, moved_far=double, share=double, computed=double, got=double, sent=double, is_smooth=bint, limits=bint, has=bint, num=Py_ssize_t, at=Py_ssize_t, rank=Py_ssize_t)
    @cython.final
    cdef void look_at(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert) noexcept nogil
    @cython.locals(pairs=double, got=double, sent=double, gets=double, sends=double, is_smooth=bint, is_held=bint, is_sent=bint)
    @cython.final
    cdef void look_between(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert) noexcept nogil
    @cython.final
    cdef void look_without(self, Py_ssize_t node, Py_ssize_t row, Py_ssize_t expert) noexcept nogil
    @cython.locals(tokens=double, near=double, far=double, far_device=double, moved_near=double, moved_far=double, moved_device=double, hops=Py_ssize_t, fill=Py_ssize_t, is_smooth=bint, is_held=bint, row=Py_ssize_t)
    cdef double price_with(self, Py_ssize_t expert, Py_ssize_t beside) noexcept nogil

cdef class Search(Layer):
    cdef double best, trial_s, kept_s
    cdef unsigned char[:, ::1] kept_ED, owners_ED, start_ED, tried_D
    cdef Py_ssize_t most_replicated, most_prices
    cdef double[::1] part_E, plan_D
    cdef Py_ssize_t[::1] is_tired_E, want_E, by_owner_E, first_D, hottest_E, order_D, taken_D
    cdef double[:, ::1] load_DE, load_NE
    @cython.locals(seconds=double)
    cdef void keep(self) noexcept nogil
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
    @cython.locals(gained=bint)
    cdef void climb(self) noexcept nogil
    @cython.locals(is_device=bint, is_sent=bint, node=Py_ssize_t, near=double, each_far=double)
    cdef double part_of(self, Py_ssize_t expert, Py_ssize_t place, Py_ssize_t column) noexcept nogil
    cdef Py_ssize_t largest_part(self) noexcept nogil
    @cython.locals(room=Py_ssize_t, gain=double, most=double, wanted=Py_ssize_t, picked=Py_ssize_t, more=Py_ssize_t)
    cdef Py_ssize_t give_away(self, bint in_all_nodes, double level, Py_ssize_t room) noexcept nogil
    cdef void place_wanted(self) noexcept nogil
    @cython.locals(num_taken=Py_ssize_t, num_left=Py_ssize_t, at=Py_ssize_t, is_free=bint)
    cdef void place(self, Py_ssize_t expert, double part, Py_ssize_t most) noexcept nogil
    @cython.locals(at=Py_ssize_t)
    cdef void sort(self, Py_ssize_t[::1] devices, Py_ssize_t num) noexcept nogil
    @cython.final
    cdef bint has_less(self, Py_ssize_t one, Py_ssize_t other) noexcept nogil
    cdef void seed_by_levels(self) noexcept nogil
    @cython.locals(turn=Py_ssize_t, missed=Py_ssize_t, expert=Py_ssize_t)
    cdef void kick(self) noexcept nogil
    @cython.locals(num_replicated=Py_ssize_t)
    cdef void seed_by_sources(self) noexcept nogil
    @cython.locals(most=double, load=double, has=bint, is_first=bint)
    cdef Py_ssize_t fetch(self, Py_ssize_t device, bint for_node, Py_ssize_t num) noexcept nogil
    cdef void prune(self) noexcept nogil
    cdef void run(self) noexcept nogil

@cython.locals(over=Py_ssize_t, left=Py_ssize_t, taken=Py_ssize_t, num=Py_ssize_t)
cpdef Py_ssize_t spill_below(Py_ssize_t[::1] load_E, Py_ssize_t[::1] by_owner_E, Py_ssize_t[::1] first_D, Py_ssize_t[::1] busiest_first_D, Py_ssize_t[:, ::1] nearest_ED, Py_ssize_t[::1] room_D, Py_ssize_t[::1] left_D, Py_ssize_t[:, ::1] spilled) noexcept nogil

@cython.locals(has_room=bint)
cpdef Py_ssize_t greedy_steps(Py_ssize_t[::1] owner_E, Py_ssize_t[::1] load_E, Py_ssize_t[:, ::1] inputs_ED, Py_ssize_t[:, ::1] fewest_first_ED, Py_ssize_t[::1] computed_D, Py_ssize_t[::1] received_D, Py_ssize_t[::1] left_D, Py_ssize_t[::1] is_selected_E, Py_ssize_t[:, ::1] replicas, Py_ssize_t[:, ::1] after, double tolerance, Py_ssize_t num_left_out) noexcept nogil

cdef void _copy(unsigned char[:, ::1] source_ED, unsigned char[:, ::1] to_ED) noexcept nogil
cdef double _raised(bint is_smooth, double value) noexcept nogil
cdef double _join(bint is_smooth, double most, double value) noexcept nogil
cdef double _eighth_root(double number) noexcept nogil
