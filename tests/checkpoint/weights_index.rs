//! Indexes of several weights files that do not fit the files.

use fsdp_runtime::Error;
use fsdp_runtime::errors::LoadError;
use fsdp_runtime::pretrained::SavePretrained;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::pretrained::{load, save};

#[test]
fn every_difference_of_an_index_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    save(1, folder.path(), &SavePretrained::new().with_max_shard_size(8_000));
    let path = folder.path().join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let good: serde_json::Value = serde_json::from_str(&text).unwrap();
    let write = |index: &serde_json::Value| {
        std::fs::write(&path, index.to_string()).unwrap();
    };
    let problems = || match load(2, folder.path()).unwrap_err() {
        Error::Load(LoadError::Index { file, problems }) => {
            assert!(file.ends_with("model.safetensors.index.json"));
            problems
        }
        error => panic!("{error}"),
    };

    let mut index = good.clone();
    let map = index["weight_map"].as_object_mut().unwrap();
    let home = map["head.weight"].clone();
    map["embed.position"] = "model-00099-of-00099.safetensors".into();
    map["head.bias"] = "../elsewhere.safetensors".into();
    map.remove("head.weight");
    map.insert("ghost".into(), home.clone());
    write(&index);
    let problems_found = problems();
    let one = |text: &str| problems_found.iter().any(|problem| problem.contains(text));
    assert!(one("model-00099-of-00099.safetensors") && one("../elsewhere"), "{problems_found:?}");
    assert!(one(&format!("`ghost`: not in {}", home.as_str().unwrap())), "{problems_found:?}");
    assert!(one("`head.weight`"), "{problems_found:?}");

    write(&good);
    let name = good["weight_map"]["head.bias"].as_str().unwrap();
    let shard = folder.path().join(name);
    let whole = std::fs::read(&shard).unwrap();
    let bytes = [0; 9 * 4];
    let bias = TensorView::new(Dtype::F32, vec![9], &bytes).unwrap();
    std::fs::write(&shard, safetensors::serialize([("head.bias", bias)], None).unwrap()).unwrap();
    let mut index = good.clone();
    index["weight_map"]
        .as_object_mut()
        .unwrap()
        .retain(|key, file| key == "head.bias" || file != name);
    write(&index);
    let Error::Load(LoadError::Mismatch { misshapen, .. }) = load(1, folder.path()).unwrap_err()
    else {
        panic!("a wrong shape is a mismatch");
    };
    assert_eq!(misshapen, [format!("head.bias: [9] in {name}, [3] in the model")]);

    write(&good);
    // A torn or missing shard is named with the tensors that the index has in it.
    let names_all = |problems: Vec<String>, what: &str| {
        let problem = problems.iter().find(|problem| problem.contains(what));
        let problem = problem.unwrap_or_else(|| panic!("{what}: {problems:?}"));
        let held = good["weight_map"].as_object().unwrap().iter();
        let first = held.filter(|(_, file)| *file == name).map(|(key, _)| format!("`{key}`")).min();
        assert!(problem.contains(name) && problem.contains(&first.unwrap()), "{problem}");
    };
    std::fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    names_all(problems(), "not a valid safetensors file");
    std::fs::remove_file(&shard).unwrap();
    names_all(problems(), "cannot read");

    for wrong in ["", "[]", "{\"weight_map\": 3}", "\u{0}"] {
        std::fs::write(&path, wrong).unwrap();
        let error = load(1, folder.path()).unwrap_err();
        assert!(matches!(&error, Error::Load(LoadError::Format { .. })), "{error}");
    }
    let empty = tempfile::tempdir().unwrap();
    let error = load(1, empty.path()).unwrap_err();
    assert!(error.to_string().contains("none of model.safetensors, "), "{error}");
}
