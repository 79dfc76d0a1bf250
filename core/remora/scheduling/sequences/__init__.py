"""Sequence batching: assignment of correlation ids to slots, controls, states and history."""
