# The pool goes down to nothing and comes back.

mock_provider "google" {}

variables {
  project_id   = "example-project"
  cluster_name = "example"
  location     = "europe-west1"
}

run "nothing_but_gpu_work_lands_there" {
  command = plan
  assert {
    condition     = google_container_node_pool.this.node_config[0].taint[0].effect == "NO_SCHEDULE" && google_container_node_pool.this.node_config[0].guest_accelerator[0].type == "nvidia-l4"
    error_message = "the nodes have their GPU and are tainted"
  }
  assert {
    condition     = google_container_node_pool.this.autoscaling[0].total_min_node_count == 0
    error_message = "no node while no pod asks"
  }
}

run "simple" {
  command = plan
  module {
    source = "./examples/simple"
  }
}

run "the_account_is_named_after_cluster_and_pool" {
  command = plan
  assert {
    condition     = google_service_account.node[0].account_id == "example-gpu"
    error_message = "as long as it fits"
  }
}

run "the_accounts_of_a_long_names_pools_differ" {
  command = plan
  variables {
    cluster_name = "production-europe-west4-inference"
    name         = "large"
  }
  assert {
    condition     = google_service_account.node[0].account_id == "production-europe-wes-${substr(sha256("production-europe-west4-inference-large"), 0, 8)}" && length(google_service_account.node[0].account_id) == 30
    error_message = "30 characters, of which the last ones are the pool's own"
  }
}

run "an_account_that_is_there_is_taken" {
  command = plan
  variables {
    service_account = "nodes@example-project.iam.gserviceaccount.com"
    labels          = { team = "vision" }
  }
  assert {
    condition     = length(google_service_account.node) == 0 && length(google_project_iam_member.node) == 0 && google_container_node_pool.this.node_config[0].service_account == "nodes@example-project.iam.gserviceaccount.com"
    error_message = "no account beside the one that is named"
  }
  assert {
    condition     = google_container_node_pool.this.node_config[0].resource_labels == tomap({ team = "vision" })
    error_message = "the machines have the labels"
  }
}

run "cluster" {
  command = plan
  variables {
    image_repository = "europe-west1-docker.pkg.dev/example-project/ml/remora"
  }
  module {
    source = "./examples/cluster"
  }
}
