"""The MoE layers of a rank at run time: plans, passes, loads, and the iterations that all layers share."""
