"""Operations whose data arrives only when something waits for them."""

from collections.abc import Callable

from tests.support.virtual_cuda.books.stream_order import StreamOrder


class UnfinishedWork:
    """Functions to call as soon as a stream or the host knows that an operation is complete."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self._works: list[tuple[int, int, Callable[[], object]]] = []

    def finish_later(self, stream: int, finish: Callable[[], object]) -> None:
        """Call a function when something waits for the last operation of a stream, or at the end."""
        self._works.append((stream, self._order.num_operations, finish))

    def finish_known(self, actor: int) -> None:
        """Call the functions of the operations that are complete for a stream or for the host."""
        for work in list(self._works):
            stream, number, finish = work
            if stream != actor and self._order.is_ordered(actor, stream, number):
                self._works.remove(work)
                finish()

    def finish_all(self) -> None:
        """Call all functions, in the order in which the operations were issued."""
        while self._works:
            self._works.pop(0)[2]()
