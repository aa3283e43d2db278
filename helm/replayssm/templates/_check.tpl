{{/* Refuse what cannot work and the schema cannot say. */}}
{{- define "replayssm.check" -}}
{{- $values := .Values -}}
{{- $incremental := eq $values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade" -}}
{{- if eq (empty $values.config.model.path) (empty $values.config.model.demo) -}}
{{- fail "config.model: set exactly one of path and demo, and the other to null" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" (include "replayssm.fullname" .)) -}}
{{- fail "the release's name has to begin with a letter; choose another, or set fullnameOverride" -}}
{{- end -}}
{{- if and $incremental (not $values.config.worker.autoscaling) -}}
{{- fail "upgradeStrategy.type: NewClusterWithIncrementalUpgrade needs config.worker.autoscaling" -}}
{{- end -}}
{{- if and $incremental (not $values.upgradeStrategy.gatewayClassName) -}}
{{- fail "upgradeStrategy.gatewayClassName: NewClusterWithIncrementalUpgrade needs one" -}}
{{- end -}}
{{- if and $incremental (or $values.ingress.enabled $values.httpRoute.enabled) -}}
{{- fail "upgradeStrategy.type: NewClusterWithIncrementalUpgrade makes a Gateway of its own; disable ingress and httpRoute" -}}
{{- end -}}
{{- if and $values.gcsFaultTolerance.enabled (not $values.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: give one" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) -}}
{{- fail "ingress.hosts: give at least one" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway" -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- if hasKey (default dict (get $values.worker.resources $kind)) $values.worker.gpuResource -}}
{{- fail (printf "worker.resources.%s: leave out %s; it is config.engine.tp" $kind $values.worker.gpuResource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
