"""GLM-5.3-Flash (`glm5_next`): Kimi Delta Attention, sparse latent attention without positions, and mHC."""
