//! Wrong use does not compile, and the compiler says what to write instead: one case for each rule.
//!
//! `TRYBUILD=overwrite cargo test --test compile_fail` accepts new messages.

#[test]
fn wrong_use_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
