"""Solvers that make fields: Navier-Stokes, smoke, airfoils."""
