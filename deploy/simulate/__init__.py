"""Runs in virtual time: the policies' own objects against simulated engines and a trainer."""
