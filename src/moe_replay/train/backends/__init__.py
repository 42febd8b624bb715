"""Training backends: one interface (`base.py`), one file for FSDP2 and one for Megatron-Core."""
