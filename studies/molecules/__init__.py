"""Molecules: sample cold from a model that was trained hot.

p_hot(x) ~ exp(-U(x) / k T_hot),      pi(x) ~ p_hot(x)^beta,      beta = T_hot / T_cold
"""
