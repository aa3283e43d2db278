{{/* Options of `ray start` per role. Ray's CPUs are numbers to schedule by: every worker pod has enough for its engine
and all small deployments, whatever CPU time the pod gets. */}}
{{- define "replayssm.rayStartParams" -}}
{{- $config := .root.Values.config -}}
{{- $params := dict -}}
{{- $resources := dict -}}
{{- if eq .role "head" -}}
{{- $_ := set $params "dashboard-host" "0.0.0.0" -}}
{{- $_ := set $params "num-cpus" "0" -}}
{{- if include "replayssm.routerOnHead" .root -}}
{{- $_ := set $resources "REPLAYSSM_ROUTER" 1 -}}
{{- end -}}
{{- else -}}
{{- $small := addf (mulf $config.api.replicas $config.api.num_cpus) 0.1 -}}
{{- $_ := set $params "num-cpus" (addf $config.worker.num_cpus $small | ceil | int | toString) -}}
{{- if and (eq $config.engine.device "cpu") (gt (int $config.engine.tp) 1) -}}
{{- $_ := set $resources "REPLAYSSM_CPU_RANK" (int $config.engine.tp) -}}
{{- end -}}
{{- end -}}
{{- if $resources -}}
{{- $_ := set $params "resources" (toJson $resources | quote) -}}
{{- end -}}
{{- merge (deepCopy .group.rayStartParams) $params | toYaml -}}
{{- end -}}

{{/* Of the image; KubeRay chooses features by it. */}}
{{- define "replayssm.rayVersion" -}}2.60.0{{- end -}}
