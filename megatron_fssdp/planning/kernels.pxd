# C types of what kernels.py declares; local variables get theirs from these.

import cython

cdef double _HIGHEST_LEVEL
cdef double _LEVEL_STEP
cdef Py_ssize_t _NUM_LEVELS
cdef Py_ssize_t _WIDTH
cdef Py_ssize_t _KICK_PRICES
cdef double _ROUNDING
cdef Py_ssize_t _MOST_FREE
cdef double _NO_PAIRS
cdef Py_ssize_t _HOP_BITS
cdef Py_ssize_t _WORK
cdef Py_ssize_t _IN
cdef Py_ssize_t _OUT
cdef Py_ssize_t _GETS
cdef Py_ssize_t _SENDS

cdef class Trees:
    cdef Py_ssize_t num_experts
    cdef Py_ssize_t num_devices
    cdef Py_ssize_t num_nodes
    cdef Py_ssize_t[::1] owner_E
    cdef Py_ssize_t[::1] node_D
    cdef Py_ssize_t[::1] first_N
    cdef Py_ssize_t[::1] member_D
    cdef Py_ssize_t[::1] place_D
    cdef Py_ssize_t[::1] start_E
    cdef unsigned char[:, ::1] has_ED
    cdef Py_ssize_t[::1] line_D
    cdef Py_ssize_t leader_at(self, Py_ssize_t expert, Py_ssize_t node) noexcept nogil
    cdef Py_ssize_t line_up(self, Py_ssize_t expert, Py_ssize_t node) noexcept nogil
    cdef Py_ssize_t write_edges(self, Py_ssize_t[:, ::1] edges) noexcept nogil
    cdef void write_edge(self, Py_ssize_t[:, ::1] edges, Py_ssize_t row, Py_ssize_t expert, Py_ssize_t source, Py_ssize_t to, Py_ssize_t depth) noexcept nogil

cdef class Layer(Trees):
    cdef double[:, ::1] load_ED
    cdef double[:, ::1] load_EN
    cdef double[::1] total_E
    cdef double all_pairs
    cdef Py_ssize_t slots
    cdef Py_ssize_t[::1] used_D
    cdef Py_ssize_t[::1] holders_E
    cdef Py_ssize_t[:, ::1] holders_EN
    cdef double[:, ::1] busy
    cdef double[:, ::1] rest_EN
    cdef double[:, ::1] own
    cdef double[:, ::1] most
    cdef Py_ssize_t[::1] hops_E
    cdef Py_ssize_t[::1] fill_E
    cdef Py_ssize_t own_hops
    cdef Py_ssize_t own_fill
    cdef Py_ssize_t hops
    cdef Py_ssize_t fill
    cdef Py_ssize_t num_prices
    cdef bint is_smooth
    cdef double[::1] dispatch_near
    cdef double[::1] dispatch_far
    cdef double[::1] combine_near
    cdef double[::1] combine_far
    cdef double per_token
    cdef double times
    cdef double[::1] start
    cdef double[::1] gather
    cdef double[::1] reduce
    cdef double hidden
    cdef double hidden_back
    cdef bint each_pass
    cdef double[:, ::1] of_hops
    cdef void count_all(self) noexcept nogil
    @cython.locals(pairs=double)
    cdef double unserved(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(num=Py_ssize_t, left=Py_ssize_t, each_far=double, place=Py_ssize_t)
    cdef void walk(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(rest=double, share=double, num=Py_ssize_t)
    cdef void walk_node(self, Py_ssize_t expert, Py_ssize_t node, double each_far) noexcept nogil
    cdef void count(self, Py_ssize_t expert, Py_ssize_t sign) noexcept nogil
    cdef void add(self, Py_ssize_t place, double sign) noexcept nogil
    cdef void put(self, Py_ssize_t expert, Py_ssize_t device, Py_ssize_t sign) noexcept nogil
    cdef double price(self) noexcept nogil
    @cython.locals(tokens=double, pairs=double, moved=double, is_smooth=bint)
    cdef void look_at(self, Py_ssize_t node, Py_ssize_t row, double weight) noexcept nogil
    @cython.locals(tokens=double, near=double, far=double, moved_near=double, moved_far=double, hops=Py_ssize_t, fill=Py_ssize_t, is_held=bint, is_smooth=bint, weight=double, row=Py_ssize_t)
    cdef double price_with(self, Py_ssize_t expert, Py_ssize_t beside) noexcept nogil
    cdef double on_link(self, double[::1] line, double pairs) noexcept nogil
    cdef double moving(self, Py_ssize_t is_far, double experts, Py_ssize_t fill, Py_ssize_t hops, Py_ssize_t first, double[::1] per_expert) noexcept nogil
    cdef double seconds(self, double tokens, double near, double far, double moved_near, double moved_far, Py_ssize_t hops, Py_ssize_t fill) noexcept nogil

cdef class Search(Layer):
    cdef double best
    cdef double trial_s
    cdef double kept_s
    cdef double plain_s
    cdef unsigned char[:, ::1] kept_ED
    cdef unsigned char[:, ::1] owners_ED
    cdef unsigned char[:, ::1] start_ED
    cdef Py_ssize_t most_replicated
    cdef Py_ssize_t most_prices
    cdef double[::1] part_E
    cdef Py_ssize_t[::1] is_tired_E
    cdef Py_ssize_t[::1] ranked
    cdef unsigned char[:, ::1] tried_D
    cdef Py_ssize_t[::1] want_E
    cdef double[::1] plan_D
    cdef Py_ssize_t[::1] by_owner_E
    cdef Py_ssize_t[::1] first_D
    cdef Py_ssize_t[::1] hottest_E
    cdef void keep(self, double seconds) noexcept nogil
    cdef void hold(self, Py_ssize_t expert, unsigned char[:, ::1] table, Py_ssize_t row) noexcept nogil
    cdef void spread(self, Py_ssize_t expert, Py_ssize_t kind) noexcept nogil
    cdef void become(self, unsigned char[:, ::1] to_ED) noexcept nogil
    @cython.locals(num=Py_ssize_t)
    cdef bint may_grow(self, Py_ssize_t expert) noexcept nogil
    @cython.locals(num=Py_ssize_t, at=Py_ssize_t, column=Py_ssize_t, most=double)
    cdef Py_ssize_t rank(self, bint of_links) noexcept nogil
    cdef Py_ssize_t least_loaded(self, Py_ssize_t expert, Py_ssize_t node, bint is_full) noexcept nogil
    cdef double note(self, Py_ssize_t expert) noexcept nogil
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
    @cython.locals(is_device=bint, node=Py_ssize_t, near=double, each_far=double)
    cdef double part_of(self, Py_ssize_t expert, Py_ssize_t place, Py_ssize_t column) noexcept nogil
    cdef Py_ssize_t largest_part(self) noexcept nogil
    @cython.locals(room=Py_ssize_t, gain=double, most=double, wanted=Py_ssize_t, picked=Py_ssize_t, more=Py_ssize_t)
    cdef Py_ssize_t give_away(self, bint in_all_nodes, double level, Py_ssize_t room) noexcept nogil
    cdef void place_wanted(self) noexcept nogil
    cdef void seed_by_levels(self) noexcept nogil
    @cython.locals(turn=Py_ssize_t, missed=Py_ssize_t, expert=Py_ssize_t)
    cdef void kick(self) noexcept nogil
    cdef void seed_everywhere(self) noexcept nogil
    cdef void prune(self) noexcept nogil
    cdef void run(self) noexcept nogil

cdef class Spilling:
    cdef Py_ssize_t[::1] load_E
    cdef Py_ssize_t[::1] load_D
    cdef Py_ssize_t[::1] by_owner_E
    cdef Py_ssize_t[::1] first_D
    cdef Py_ssize_t[::1] busiest_first_D
    cdef Py_ssize_t[:, ::1] nearest_ED
    cdef Py_ssize_t slots
    cdef Py_ssize_t[::1] room_D
    cdef Py_ssize_t[::1] left_D
    cdef Py_ssize_t[:, ::1] spilled
    cdef Py_ssize_t num_spilled
    cdef Py_ssize_t total
    cdef double tolerance
    cdef bint fits_below(self, Py_ssize_t ceiling) noexcept nogil
    @cython.locals(left=Py_ssize_t, wanted=Py_ssize_t, taken=Py_ssize_t)
    cdef Py_ssize_t spill_expert(self, Py_ssize_t expert, Py_ssize_t over) noexcept nogil
    cdef void run(self) noexcept nogil

cdef class GreedySteps:
    cdef Py_ssize_t[::1] owner_E
    cdef Py_ssize_t[::1] load_E
    cdef Py_ssize_t[:, ::1] inputs_ED
    cdef Py_ssize_t[:, ::1] fewest_first_ED
    cdef Py_ssize_t[::1] computed_D
    cdef Py_ssize_t[::1] received_D
    cdef Py_ssize_t[::1] left_D
    cdef Py_ssize_t[::1] is_selected_E
    cdef Py_ssize_t[:, ::1] replicas
    cdef Py_ssize_t[:, ::1] after
    cdef Py_ssize_t num_replicas
    cdef Py_ssize_t num_steps
    cdef Py_ssize_t num_left_out
    cdef Py_ssize_t most_steps
    cdef double tolerance
    @cython.locals(has_room=bint)
    cdef Py_ssize_t run(self) noexcept nogil

cdef void _copy(unsigned char[:, ::1] source_ED, unsigned char[:, ::1] to_ED) noexcept nogil
cdef double _raised(bint is_smooth, double value) noexcept nogil
cdef double _join(bint is_smooth, double most, double value) noexcept nogil
cdef double _eighth_root(double number) noexcept nogil
