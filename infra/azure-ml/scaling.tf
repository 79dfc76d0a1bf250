# Instances follow the GPUs of the deployment where it has some, and its processors elsewhere: on a GPU the processors idle
# while the batches queue. A deployment with one instance at most needs no rules.

resource "azurerm_monitor_autoscale_setting" "deployment" {
  for_each            = { for name, each in var.deployments : name => each if each.instances.max > each.instances.min }
  name                = "${var.name}-${each.key}"
  resource_group_name = var.resource_group_name
  location            = var.location
  target_resource_id  = azapi_resource.deployment[each.key].id
  tags                = var.tags

  # The recurring profiles rule at their hours, and this one in between. Azure wants an end for each of them, which is a
  # profile with the same limits and rules as this one, named after both.
  dynamic "profile" {
    for_each = local.profiles
    content {
      name = profile.value.name
      capacity {
        minimum = min(max(each.value.instances.min, profile.value.least), each.value.instances.max)
        default = min(max(each.value.instances.min, profile.value.least), each.value.instances.max)
        maximum = each.value.instances.max
      }
      dynamic "recurrence" {
        for_each = profile.value.at == null ? [] : [profile.value.at]
        content {
          days     = recurrence.value.days
          hours    = [recurrence.value.hour]
          minutes  = [0]
          timezone = recurrence.value.timezone
        }
      }

      dynamic "rule" {
        for_each = {
          Increase = { operator = "GreaterThan", threshold = var.scale_at_percent.out, window = "PT5M", cooldown = "PT5M" }
          Decrease = { operator = "LessThan", threshold = var.scale_at_percent.in, window = "PT15M", cooldown = "PT15M" }
        }
        content {
          metric_trigger {
            metric_name        = each.value.scale_metric != null ? each.value.scale_metric : (can(regex("^Standard_N", each.value.instance_type)) ? "GpuUtilizationPercentage" : "CpuUtilizationPercentage")
            metric_resource_id = azapi_resource.deployment[each.key].id
            time_grain         = "PT1M"
            statistic          = "Average"
            time_window        = rule.value.window
            time_aggregation   = "Average"
            operator           = rule.value.operator
            threshold          = rule.value.threshold
          }
          scale_action {
            direction = rule.key
            type      = "ChangeCount"
            value     = "1"
            cooldown  = rule.value.cooldown
          }
        }
      }
    }
  }
}

locals {
  base = { name = "load", least = 0, at = null }
  profiles = concat(
    [local.base],
    flatten([for key in sort(keys(var.schedule)) : [
      {
        name  = key
        least = var.schedule[key].instances
        at    = { days = var.schedule[key].days, hour = var.schedule[key].begin, timezone = var.schedule[key].timezone }
      },
      {
        # Azure's own form for the end of a profile.
        name  = jsonencode({ name = local.base.name, for = key })
        least = local.base.least
        at    = { days = var.schedule[key].days, hour = var.schedule[key].end, timezone = var.schedule[key].timezone }
      },
    ]]),
  )
}
