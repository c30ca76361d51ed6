"""Which iteration it is, moments on a device, stopwatches of layers, and the times of passes."""
