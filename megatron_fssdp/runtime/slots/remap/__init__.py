"""From experts to slots: share tables and exact shares, in torch and in Triton."""
