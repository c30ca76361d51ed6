"""Part of balanced dispatch: divides tokens among receivers so that the highest load is as low as possible.

Shape letters: U positions among an expert's holders.
"""

from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Flag, Index, Int, Ints
from megatron_fssdp.planning.native.work_arrays import zero_ints


@cython.cclass
class WaterFilling:
    """Divides an amount into whole parts so that the highest load is as low as possible.

    Attributes:
        rising_U: Receivers of the present division. The caller writes them, ascending; a division sorts them.
        load_U: Load of each receiver before, 0 or more.
        room_U: Most that each receiver may get, 0 or more.
        part_U: Part of each receiver, the result.
    """

    rising_U: Ints
    load_U: Ints
    room_U: Ints
    part_U: Ints

    def __init__(self, size: Index) -> None:
        self.rising_U = zero_ints(size)
        self.load_U = zero_ints(size)
        self.room_U = zero_ints(size)
        self.part_U = zero_ints(size)

    @cython.inner
    def divide(self, amount: Int, num_receivers: Index) -> cython.void:
        """Divide an amount, at most the sum of the room, among the first receivers of ``rising_U``."""
        for i in range(num_receivers):
            self.part_U[self.rising_U[i]] = 0
        self.sort(num_receivers)
        while amount > 0:
            # Without limits, the receivers below a common level would all be filled up to it. Find these
            # receivers.
            total = amount
            count: Index = 0
            while count < num_receivers and self.load_U[self.rising_U[count]] * count < total:
                total += self.load_U[self.rising_U[count]]
                count += 1
            level = total // count
            ones = total - level * count
            # Receivers whose limit is below the level get their limit first. Then the others share the rest.
            num_open: Index = 0
            for i in range(num_receivers):
                receiver: Index = self.rising_U[i]
                if i < count and self.room_U[receiver] <= level - self.load_U[receiver]:
                    self.part_U[receiver] = self.room_U[receiver]
                    amount -= self.room_U[receiver]
                else:
                    self.rising_U[num_open] = receiver
                    num_open += 1
            if num_open == num_receivers:
                for i in range(count):
                    receiver = self.rising_U[i]
                    self.part_U[receiver] = level + (1 if i < ones else 0) - self.load_U[receiver]
                return
            num_receivers = num_open

    @cython.inner
    def sort(self, num_receivers: Index) -> cython.void:
        """Sort the first receivers of ``rising_U`` by load, equal loads by number (heap sort)."""
        start: Index = num_receivers // 2
        end = num_receivers
        while end > 1:
            if start > 0:  # build the heap
                start -= 1
                moved: Index = self.rising_U[start]
            else:  # take the highest load out
                end -= 1
                moved = self.rising_U[end]
                self.rising_U[end] = self.rising_U[0]
            parent = start
            while 2 * parent + 1 < end:
                child = 2 * parent + 1
                if child + 1 < end and self.comes_before(self.rising_U[child], self.rising_U[child + 1]):
                    child += 1
                if not self.comes_before(moved, self.rising_U[child]):
                    break
                self.rising_U[parent] = self.rising_U[child]
                parent = child
            self.rising_U[parent] = moved

    @cython.inner
    def comes_before(self, first: Index, second: Index) -> Flag:
        """Whether a receiver has a lower load than another one, or an equal load and a lower number."""
        if self.load_U[first] == self.load_U[second]:
            return first < second
        return bool(self.load_U[first] < self.load_U[second])
