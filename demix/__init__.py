"""demix: language models made of domain experts (Gururangan et al. 2021, "DEMix Layers")."""
