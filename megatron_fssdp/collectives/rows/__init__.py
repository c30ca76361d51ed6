"""Collectives that carry rows of tokens: in one exchange, in steps, or in the orders of Parm's schedules."""
