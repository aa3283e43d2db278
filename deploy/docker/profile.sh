# For login shells, which set PATH anew; KubeRay starts Ray from one.
PATH=/opt/replayssm/bin:/usr/local/cuda/bin:$PATH
