"""What-if: strategies' decisions on described clusters, and the loads to ask with."""
