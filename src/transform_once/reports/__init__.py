"""Figures and pages made from results."""
