#[derive(UnitValue)]
pub enum Step<T> {
    Done,
    Next(Tensor<3>, Vec<T>),
    Last { hidden: Tensor<3> },
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    impl<T> __fsdp::UnitValue for Step<T>
    where
        T: __fsdp::UnitValue,
    {
        fn map_tensors(
            self,
            __fsdp_map: &mut dyn ::core::ops::FnMut(
                __fsdp::DispatchTensor,
            ) -> __fsdp::DispatchTensor,
        ) -> Self {
            match self {
                Self::Done {} => Self::Done {},
                Self::Next { 0: __fsdp_0, 1: __fsdp_1 } => {
                    Self::Next {
                        0: <Tensor<
                            3,
                        > as __fsdp::UnitValue>::map_tensors(__fsdp_0, __fsdp_map),
                        1: <Vec<
                            T,
                        > as __fsdp::UnitValue>::map_tensors(__fsdp_1, __fsdp_map),
                    }
                }
                Self::Last { hidden: __fsdp_0 } => {
                    Self::Last {
                        hidden: <Tensor<
                            3,
                        > as __fsdp::UnitValue>::map_tensors(__fsdp_0, __fsdp_map),
                    }
                }
            }
        }
        fn visit_tensors(
            &self,
            __fsdp_visit: &mut dyn ::core::ops::FnMut(__fsdp::DispatchTensor),
        ) {
            match *self {
                Self::Done {} => {}
                Self::Next { 0: ref __fsdp_0, 1: ref __fsdp_1 } => {
                    <Tensor<
                        3,
                    > as __fsdp::UnitValue>::visit_tensors(__fsdp_0, __fsdp_visit);
                    <Vec<T> as __fsdp::UnitValue>::visit_tensors(__fsdp_1, __fsdp_visit);
                }
                Self::Last { hidden: ref __fsdp_0 } => {
                    <Tensor<
                        3,
                    > as __fsdp::UnitValue>::visit_tensors(__fsdp_0, __fsdp_visit);
                }
            }
        }
    }
};
