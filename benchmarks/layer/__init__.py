"""The MoE layer beside other MoE layers, and beside what the machine allows."""
