"""Collectives that carry rows of tokens, at once, in steps, or in Parm's orders."""
