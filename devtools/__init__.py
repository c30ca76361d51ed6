"""Tools of development: virtual CUDA devices, several ranks on one card, a made profile, a browser."""
