"""Optimizers that exchange what they learn: one class per way to do so."""
