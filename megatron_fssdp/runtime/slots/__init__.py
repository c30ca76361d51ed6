"""From the routing of logical experts to the routing of slots, on the device and without a host wait."""
