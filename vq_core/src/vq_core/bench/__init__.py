"""Measuring speed: honest by construction, as ratios of arms that take turns in one process."""
