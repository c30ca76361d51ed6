import cython

@cython.locals(over=Py_ssize_t, left=Py_ssize_t, taken=Py_ssize_t, num=Py_ssize_t)
cpdef Py_ssize_t spill_below(Py_ssize_t[::1] load_E, Py_ssize_t[::1] by_owner_E, Py_ssize_t[::1] first_D, Py_ssize_t[::1] busiest_first_D, Py_ssize_t[:, ::1] nearest_ED, Py_ssize_t[::1] room_D, Py_ssize_t[::1] left_D, Py_ssize_t[:, ::1] spilled) noexcept nogil

@cython.locals(has_room=bint)
cpdef Py_ssize_t greedy_steps(Py_ssize_t[::1] owner_E, Py_ssize_t[::1] load_E, Py_ssize_t[:, ::1] inputs_ED, Py_ssize_t[:, ::1] fewest_first_ED, Py_ssize_t[::1] computed_D, Py_ssize_t[::1] received_D, Py_ssize_t[::1] left_D, Py_ssize_t[::1] is_selected_E, Py_ssize_t[:, ::1] replicas, Py_ssize_t[:, ::1] after, double tolerance, Py_ssize_t num_left_out) noexcept nogil

