"""Inputs that two models are compared on."""
